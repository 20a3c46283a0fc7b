"""What measures the rows of meanfield2019."""
