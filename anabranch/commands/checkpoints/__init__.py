"""`anabranch checkpoints`: what a restart of the learner resumes from."""
