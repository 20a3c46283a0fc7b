"""The findings of a measurement alone. Each module holds functions from a reading to the findings of one kind."""
