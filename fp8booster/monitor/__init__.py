"""What training does while it runs: the bytes it sends."""
