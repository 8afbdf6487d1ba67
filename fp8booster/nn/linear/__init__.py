"""A linear layer whose products run in FP8: its autograd function, its classes, what layers share."""
