"""Experts of a mixture: routing, dispatch to ranks, and the products of all experts of a rank at once."""
