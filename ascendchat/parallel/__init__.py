"""Many processes: who this one is, how they meet, what they exchange, how a model is divided."""
