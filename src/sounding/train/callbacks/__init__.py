"""The only place that knows TensorBoard, Weights & Biases, Lightning and transformers' Trainer, each when used.

The names are those of `sounding.train`.
"""
