"""The evidence: the same arms in five settings, five seeds each. README.md has the commands."""
