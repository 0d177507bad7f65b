"""All stages of a recipe, from text to a chat model: `ascendchat speedrun`."""
