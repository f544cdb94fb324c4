"""What schemathesis is told of a cluster: most requests name a model that is served, so that they get further than that."""

import os

import schemathesis

MODEL = os.environ["THALWEG_MODEL"]


@schemathesis.hook
def map_body(context, body):
    if isinstance(body, dict) and isinstance(body.get("model"), str):
        # Every fifth or so keeps the name that was made up.
        if sum(body["model"].encode()) % 5:
            body["model"] = MODEL
    return body
