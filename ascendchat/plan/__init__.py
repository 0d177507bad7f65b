"""`ascendchat plan`: parameters, memory, batch, hours and cost of a run."""
