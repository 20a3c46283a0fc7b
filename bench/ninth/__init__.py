"""A held-out set: sound networks, faults planted in them, and harmless variants."""
