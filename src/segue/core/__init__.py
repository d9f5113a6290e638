"""The running handover: what stands at a site, and what drives it."""
