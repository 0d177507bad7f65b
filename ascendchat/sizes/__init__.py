"""The dial: from one depth to shape, batch, schedule and memory. No torch."""
