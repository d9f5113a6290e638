"""What every page and figure shares: records, statistics, palette, text of numbers."""
