"""The nine findings. Each module holds functions from a reading to the findings of one kind."""
