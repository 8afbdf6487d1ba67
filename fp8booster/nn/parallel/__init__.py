"""Exchanges between ranks around the products of sharded layers, and attention over a ring of ranks."""
