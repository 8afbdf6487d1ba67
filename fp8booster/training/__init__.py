"""What the command line, the benchmarks and the examples share: models by name, batches, learning rate, plugins, steps.

Nothing here knows of files, options or displays.
"""
