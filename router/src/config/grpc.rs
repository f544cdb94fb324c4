//! Settings of the router's own gRPC service.

use std::net::SocketAddr;

use thalweg_proto::value;

/// Inference over gRPC, for callers within the cluster's network.
#[derive(Clone, Debug, Default, PartialEq, clap::Args, serde::Serialize, serde::Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Grpc {
    /// Address of the gRPC API, by convention port 50051; port 0 takes a free one. Without it there is none
    #[arg(long, env = "THALWEG_GRPC", value_name = "ADDRESS", value_parser = value::address)]
    pub grpc: Option<SocketAddr>,

    /// Let --grpc be reached from other hosts without API keys, certificates or a token
    #[arg(long, env = "THALWEG_INSECURE")]
    pub insecure: bool,
}
