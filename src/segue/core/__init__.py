"""The running handover: the module at a site, and what drives it."""
