"""The lab: experiments with the core. Needs `pip install segue[lab]`."""
