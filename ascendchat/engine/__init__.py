"""Generation: prompts in, tokens out, many at a time. request.py is where to begin; `ascendchat chat` and
`ascendchat bench decode` use it, and so does `ascendchat eval chat`."""
