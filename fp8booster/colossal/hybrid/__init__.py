"""The seam to Colossal-AI's hybrid parallelism: gradients over its groups, with and without ZeRO."""
