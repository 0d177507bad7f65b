"""`ascendchat launch`: one command on many devices or nodes."""
