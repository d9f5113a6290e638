"""fit(): the one training loop and what it needs."""
