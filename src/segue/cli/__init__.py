"""The `segue` command."""
