"""What measures the rows of orth2021, and of thesis2024 chapter 2, which repeats it."""
