"""What the benchmark of collectives measures: the calls, and how ranks take turns."""
