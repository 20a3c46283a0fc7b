"""What measures the rows of rank2020."""
