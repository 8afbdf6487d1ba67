"""The seam to Colossal-AI's ZeRO, stages 1 and 2."""
