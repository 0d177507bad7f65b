"""JSON schemas drawn at random, of everything that a grammar is made of: for tests that answers validate."""

from __future__ import annotations

import random
from typing import Any

PATTERNS = ["^[a-c]{1,4}$", "^x-[0-9]{2}$", "^(red|green|blue)$", "[0-9]{2}$", "^[A-Z][a-z]{0,5}$", "^é?你{1,2}$"]
VALUES: list[Any] = [0, -7, 12.5, True, False, None, "", "red", "你好", 'a "quote"\n', "tab\t\\", [1, 2], {"k": [None]}]
NAMES = ["name", "age", "list", "你", "a b", 'q"uote', "x1", "next", "ok"]

Schema = dict[str, Any]


class SchemaMaker:
    """A schema per call; what it refers to stands in its $defs."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.defs: dict[str, Schema] = {}

    def schema(self) -> Schema:
        """Usually an object, as people ask for."""
        made = self.object(3) if self.draw.random() < 0.7 else self.any(3)
        return {"$defs": self.defs, **made} if self.defs else made

    def any(self, depth: int) -> Schema:
        """Something; nothing nested at depth 0."""
        flat = [self.integer, self.number, self.string, self.enum, self.const, self.simple]
        nested = [self.object, self.array, self.any_of, self.reference, self.prefix, self.tree]
        choice = self.draw.choice(flat * 2 + nested if depth > 0 else flat)
        return choice(depth - 1)

    def integer(self, _: int) -> Schema:
        low = self.draw.randint(-300, 300)
        made: Schema = {"type": "integer", "minimum": low, "maximum": low + self.draw.randint(0, 400)}
        if self.draw.random() < 0.3:
            made |= {"multipleOf": self.draw.choice([2, 5, 7]), "maximum": low + 50}
        if self.draw.random() < 0.3:
            made["exclusiveMinimum"] = made.pop("minimum") - 1
        return made

    def number(self, _: int) -> Schema:
        low = self.draw.randint(-40, 40) / 8
        ends = {("minimum", "exclusiveMinimum")[self.draw.random() < 0.3]: low}
        ends[("maximum", "exclusiveMaximum")[self.draw.random() < 0.3]] = low + self.draw.randint(1, 90) / 8
        return {"type": "number", **ends}

    def string(self, _: int) -> Schema:
        if self.draw.random() < 0.4:
            return {"type": "string", "pattern": self.draw.choice(PATTERNS), "maxLength": 9}
        if self.draw.random() < 0.06:
            return {"type": "string"}  # a random model seldom ends it
        least = self.draw.randint(0, 3)
        return {"type": "string", "minLength": least, "maxLength": least + self.draw.randint(0, 8)}

    def enum(self, _: int) -> Schema:
        return {"enum": self.draw.sample(VALUES, self.draw.randint(1, 5))}

    def const(self, _: int) -> Schema:
        return {"const": self.draw.choice(VALUES)}

    def simple(self, _: int) -> Schema:
        kinds = self.draw.sample(["boolean", "null", "string", "integer"], self.draw.randint(1, 2))
        made: Schema = {"type": kinds[0] if len(kinds) == 1 else kinds}
        return made | ({"maxLength": 6} if "string" in kinds else {})

    def object(self, depth: int) -> Schema:
        names = self.draw.sample(NAMES, self.draw.choice((0, 1, 2, 3, 4, 4)))
        made: Schema = {"type": "object", "properties": {name: self.any(depth) for name in names}}
        made["required"] = [name for name in names if self.draw.random() < 0.8]
        if self.draw.random() < 0.8:
            made["additionalProperties"] = False
        elif self.draw.random() < 0.5:
            made["additionalProperties"] = self.any(0)
        else:
            made |= {"patternProperties": {"^p[0-9]$": self.any(0)}, "additionalProperties": False}
        return made

    def array(self, depth: int) -> Schema:
        least = self.draw.randint(0, 2)
        return {
            "type": "array",
            "items": self.any(depth),
            "minItems": least,
            "maxItems": least + self.draw.randint(0, 2),
        }

    def prefix(self, depth: int) -> Schema:
        first = [self.any(depth - 1), self.any(0)]
        return {"type": "array", "prefixItems": first, "items": False, "minItems": self.draw.randint(0, 2)}

    def any_of(self, depth: int) -> Schema:
        return {"anyOf": [self.any(depth) for _ in range(self.draw.randint(2, 3))]}

    def reference(self, depth: int) -> Schema:
        name = f"d{len(self.defs)}"
        self.defs[name] = {}
        self.defs[name] = self.any(depth)
        return {"$ref": f"#/$defs/{name}"}

    def tree(self, _: int) -> Schema:
        """Nested as deeply as the model likes."""
        more = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]}
        properties = {"v": {"type": "boolean"}, "next": more}
        self.defs["tree"] = {"type": "object", "properties": properties, "required": ["v", "next"]}
        self.defs["tree"]["additionalProperties"] = False
        return {"$ref": "#/$defs/tree"}
