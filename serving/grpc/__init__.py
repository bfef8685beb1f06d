"""The Open Inference Protocol v2 over gRPC. Imported only where `serving.grpc_port` is set."""
