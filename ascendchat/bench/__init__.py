"""Measures training, decoding and serving."""
