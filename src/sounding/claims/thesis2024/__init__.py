"""What measures the rows of thesis2024."""
