"""Define the calls that the benchmark of collectives measures, and how ranks take turns."""
