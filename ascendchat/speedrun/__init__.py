"""`ascendchat speedrun`: every stage of a recipe, from text to a chat model."""
