"""What would keep a learner from its first step: checks of the state, the object store, the device and the model."""
