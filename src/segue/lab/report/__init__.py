"""Reports: statistics, figures, tables and one HTML page, made only from saved runs."""
