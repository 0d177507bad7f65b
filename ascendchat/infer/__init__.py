"""Generation: prompts in, tokens out, many at a time. engine.py is where to begin; `ascendchat chat` and
`ascendchat bench decode` use it, and so does `ascendchat eval chat`."""
