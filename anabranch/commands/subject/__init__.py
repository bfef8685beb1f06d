"""`anabranch init --subject`: a pipeline whose `[schema]` comes from a subject of the Schema Registry."""
