"""Models by name, batches, plugins and steps: shared by the command line, the benchmarks and the examples.

Nothing here knows of files, options or displays.
"""
