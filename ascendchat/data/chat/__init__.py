"""Conversations: formats, templates, tables, and rows to train on."""
