"""Generation in other processes: our server or vLLM, one of them or many."""
