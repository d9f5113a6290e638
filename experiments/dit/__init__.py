"""Parts of a diffusion transformer replaced, by three methods."""
