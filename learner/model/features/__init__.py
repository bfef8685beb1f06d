"""Features learned on the stream: raw columns in, the inputs of the user's model out.

The modules are part of the model: their buffers are in versions and checkpoints, and a pass only reads them. `observe`
alone changes them, once for each new event, after the step that trains on it.
"""
