"""The seam to Colossal-AI's Gemini, which shards, offloads and gathers parameters in chunks."""
