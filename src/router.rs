//! `thalweg router`: HTTP in front, workers behind.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use thalweg_membership::{EtcdMembership, GrpcAddress, Membership, Record, StaticMembership};
use thalweg_router::config::RouterConfig;
use thalweg_router::router::Router;

use crate::options::{BadOption, IndexOptions, MembershipOptions, TrustOptions};
use crate::shutdown::Signals;
use crate::worker::host_name;

/// Flags of `thalweg router`.
#[derive(clap::Args)]
pub(crate) struct Options {
    #[command(flatten)]
    router: RouterConfig,

    /// Address of a worker, such as grpc://10.0.0.7:50061; repeat for each
    #[arg(long, env = "THALWEG_WORKER", value_name = "ADDRESS", value_delimiter = ',')]
    worker: Vec<GrpcAddress>,

    #[command(flatten)]
    index: IndexOptions,

    #[command(flatten)]
    membership: MembershipOptions,

    #[command(flatten)]
    trust: TrustOptions,
}

/// Serves until a signal.
pub(crate) async fn run(mut options: Options) -> anyhow::Result<()> {
    let etcd = options.membership.open()?;
    let contradiction = match (etcd.is_some(), options.worker.is_empty()) {
        (false, true) => Some(
            "--worker: at least one is needed, such as --worker grpc://127.0.0.1:50061, or --membership \
             etcd://host:2379",
        ),
        (true, false) => {
            Some("--worker and --membership etcd:// exclude each other: workers register themselves in etcd")
        }
        _ => None,
    };
    if let Some(text) = contradiction {
        return Err(BadOption::because(text));
    }
    options.router.trust = options.trust.config()?;
    options.router.index_redis = options.index.redis()?;
    let id = options.router.router_id.get_or_insert_with(new_id).clone();
    let mut signals = Signals::listen()?;
    let membership: Arc<dyn Membership> = match &etcd {
        Some(etcd) => Arc::new(EtcdMembership::follow(etcd, &id)),
        None => Arc::new(StaticMembership::new(options.worker)),
    };
    let router = Router::start(options.router, membership, options.index.open()?).await?;
    let registration = etcd.map(|etcd| etcd.register_router(record(id, router.http_address())));
    let name = signals.next().await;
    tracing::info!(signal = name, "shutting down");
    // The others share the limits without us at once; what we still finish had been let in before.
    let leave = async {
        if let Some(registration) = &registration {
            registration.deregister().await;
        }
    };
    let cut_short = router.cut_short();
    signals.during(async { tokio::join!(router.shutdown(), leave).0 }, || cut_short.cancel()).await;
    Ok(())
}

/// New at each start, so that membership never takes two routers for one.
fn new_id() -> String {
    let started = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos());
    format!("{}-pid-{}-{started:x}", host_name(), std::process::id())
}

fn record(id: String, http: SocketAddr) -> Record {
    let version = env!("CARGO_PKG_VERSION").to_owned();
    Record { id, address: http.to_string(), draining: false, models: Vec::new(), version }
}
