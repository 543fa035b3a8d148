//! A Redis or Valkey server, alone or as a cluster: where copies of segments lie by their numbers.
//!
//! Owns the connections and the names of keys. What is in a value is sealed before it comes here.
//!
//! # Keys
//!
//! `quire:{RUN.GROUP}:COPY` is a copy of a segment, and `quire:{RUN}:lease` says that the run lives. RUN is a random
//! name; the groups put a run's copies on a few hash slots, so that one pipeline carries many of them. All of them go
//! by themselves some time after the run's last word ([`TTL`], [`LEASE`]). `quire:runs:USER` has the runs of a user,
//! each with the numbers between which its copies are: a later run [sweeps](Server::sweep) those whose lease is over.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use redis::aio::{ConnectionManager, ConnectionManagerConfig};
use redis::cluster::ClusterClientBuilder;
use redis::cluster_async::ClusterConnection;
use redis::cluster_routing::{MultipleNodeRoutingInfo, RoutingInfo};
use redis::io::tcp::TcpSettings;
use redis::{Client, Cmd, ConnectionInfo, FromRedisValue, IntoConnectionInfo as _, Pipeline};
use redis::{ErrorKind, RedisError, RedisResult, Value, cmd, pipe};

/// How long the run counts as alive after its last word, which it says four times as often.
pub(super) const LEASE: Duration = Duration::from_secs(600);
/// How long a copy is kept after it was last asked for that: for the lease, if the last word was just before the next.
const TTL: Duration = Duration::from_secs(LEASE.as_secs() / 4 * 5);
/// Hash tags of a run.
pub(super) const GROUPS: usize = 16;
/// Keys that one pipeline names.
const BATCH: usize = 500;
/// How long an answer may take, and a connection.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);
const CONNECTED_WITHIN: Duration = Duration::from_secs(5);
/// How long a replica may take to have what its master was told.
const REPLICATED_WITHIN: Duration = Duration::from_secs(1);

enum Connection {
    One(ConnectionManager),
    Cluster(ClusterConnection),
}

/// A run's part of a server.
pub(crate) struct Server {
    connection: Connection,
    /// That on which copies go, and are removed: who waits for a replica holds up what comes behind it.
    writes: Connection,
    /// What messages say: addresses without a password.
    pub name: String,
    run: String,
    user: String,
    /// Per group: whether its master has a replica, as far as was seen. A replica has what is written before the write
    /// counts.
    replicated: [AtomicBool; GROUPS],
}

impl Server {
    /// Connects to `addresses` (several, with commas, of one cluster), and sees to it that what is written there
    /// stays there.
    pub(crate) async fn connect(addresses: &str, run: u64) -> Result<Server> {
        let infos = addresses.split(',').map(|address| connection_info(address.trim()));
        let infos: Vec<ConnectionInfo> = infos.collect::<Result<_>>()?;
        let name = infos.iter().map(shown).collect::<Vec<_>>().join(",");
        let open = async || {
            open(&infos, &name).await.with_context(|| format!("cannot use {name} for pages"))
        };
        let (connection, writes) = (open().await?, open().await?);
        let user = rustix::process::getuid().as_raw().to_string();
        let run = format!("{run:016x}");
        let replicated = std::array::from_fn(|_| AtomicBool::new(false));
        let server = Server { connection, writes, name, run, user, replicated };
        server.check().await.with_context(|| format!("cannot use {} for pages", server.name))?;
        Ok(server)
    }

    /// Refuses servers that may drop what they were given.
    async fn check(&self) -> Result<()> {
        for info in self.all_masters("memory").await.map_err(told)? {
            let policy = field(&info, "maxmemory_policy").unwrap_or("noeviction");
            if policy != "noeviction" {
                bail!(
                    "its maxmemory-policy is {policy}, by which it may drop pages; set it to noeviction"
                );
            }
        }
        let infos = self.all_masters("replication").await.map_err(told)?;
        if infos.iter().any(|info| field(info, "role").is_some_and(|role| role != "master")) {
            bail!("it is a replica, which cannot be written to; name its master");
        }
        self.note_replicas(&infos);
        Ok(())
    }

    pub(super) async fn look_for_replicas(&self) {
        self.note_replicas(&self.all_masters("replication").await.unwrap_or_default());
    }

    /// Where any master has a replica, each is taken to have one until it says otherwise.
    fn note_replicas(&self, infos: &[String]) {
        if infos.iter().any(|info| replicas(info) > 0) {
            self.replicated.iter().for_each(|group| group.store(true, Relaxed));
        }
    }

    /// What each master says of itself.
    async fn all_masters(&self, section: &str) -> RedisResult<Vec<String>> {
        let mut info = cmd("INFO");
        info.arg(section);
        match &self.connection {
            Connection::One(connection) => {
                Ok(vec![info.query_async(&mut connection.clone()).await?])
            }
            Connection::Cluster(cluster) => {
                let masters = RoutingInfo::MultiNode((MultipleNodeRoutingInfo::AllMasters, None));
                let Value::Map(answers) = cluster.clone().route_command(info, masters).await?
                else {
                    return Ok(Vec::new());
                };
                answers.into_iter().map(|(_, text)| Ok(String::from_redis_value(text)?)).collect()
            }
        }
    }

    /// Writes a copy; it is there, and on a replica where there is one, when this returns.
    pub(super) async fn put(&self, copy: u64, value: &[u8]) -> Result<()> {
        let replicated = &self.replicated[group_of(copy)];
        let mut pipe = pipe();
        pipe.cmd("SET")
            .arg(key_of(&self.run, copy))
            .arg(value)
            .arg("EX")
            .arg(TTL.as_secs())
            .ignore();
        if !replicated.load(Relaxed) {
            return Ok(self.send(&pipe).await?);
        }
        pipe.cmd("WAIT").arg(1).arg(REPLICATED_WITHIN.as_millis() as u64);
        pipe.cmd("INFO").arg("replication");
        let (acknowledged, info): (u32, String) = self.send(&pipe).await?;
        if replicas(&info) == 0 {
            // Its master has died, and this one was the replica.
            replicated.store(false, Relaxed);
        } else if acknowledged == 0 {
            bail!("no replica has it after {} ms", REPLICATED_WITHIN.as_millis());
        }
        Ok(())
    }

    /// Reads a part of a copy: `None` where there is no such key.
    pub(super) async fn get(
        &self,
        copy: u64,
        start: usize,
        length: usize,
    ) -> RedisResult<Option<Vec<u8>>> {
        let mut get = cmd("GETRANGE");
        get.arg(key_of(&self.run, copy)).arg(start).arg(start + length - 1);
        let bytes: Vec<u8> = self.query(&get).await?;
        Ok((!bytes.is_empty()).then_some(bytes))
    }

    /// Removes copies; what is not there is no error.
    pub(super) async fn remove(&self, copies: &[u64]) -> RedisResult<()> {
        self.remove_of(&self.run, copies).await
    }

    async fn remove_of(&self, run: &str, copies: &[u64]) -> RedisResult<()> {
        self.in_groups(run, copies, |pipe, key| pipe.cmd("UNLINK").arg(key).ignore()).await
    }

    /// Gives copies their whole time to live again.
    pub(super) async fn keep(&self, copies: &[u64]) -> RedisResult<()> {
        let seconds = TTL.as_secs();
        self.in_groups(&self.run, copies, |pipe, key| {
            pipe.cmd("EXPIRE").arg(key).arg(seconds).ignore()
        })
        .await
    }

    async fn in_groups(
        &self,
        run: &str,
        copies: &[u64],
        command: impl Fn(&mut Pipeline, String) -> &mut Pipeline,
    ) -> RedisResult<()> {
        let mut result = Ok(());
        for group in 0..GROUPS {
            let of_group: Vec<u64> =
                copies.iter().copied().filter(|copy| group_of(*copy) == group).collect();
            for batch in of_group.chunks(BATCH) {
                let mut pipe = pipe();
                for &copy in batch {
                    command(&mut pipe, key_of(run, copy));
                }
                // A server that is away keeps nothing from the others.
                result = self.send::<()>(&pipe).await.and(result);
            }
        }
        result
    }

    /// Says that the run lives, and has no copies but those from `low` to before `end`.
    pub(super) async fn renew(&self, low: u64, end: u64) -> RedisResult<()> {
        let mut lease = cmd("SET");
        lease.arg(lease_of(&self.run)).arg("").arg("EX").arg(LEASE.as_secs());
        self.query::<()>(&lease).await?;
        self.query(cmd("HSET").arg(self.runs()).arg(&self.run).arg(format!("{low}-{end}"))).await
    }

    /// Removes what runs of the same user left that were killed.
    pub(super) async fn sweep(&self) -> RedisResult<()> {
        let runs: Vec<(String, String)> = self.query(cmd("HGETALL").arg(self.runs())).await?;
        for (run, bounds) in runs.into_iter().filter(|(run, _)| *run != self.run) {
            if self.query(cmd("EXISTS").arg(lease_of(&run))).await? {
                continue;
            }
            let bounds = bounds
                .split_once('-')
                .and_then(|(low, end)| Some((low.parse().ok()?, end.parse().ok()?)));
            let (mut low, end): (u64, u64) = bounds.unwrap_or_default();
            while low < end {
                let next = end.min(low + (GROUPS * BATCH) as u64);
                self.remove_of(&run, &(low..next).collect::<Vec<_>>()).await?;
                low = next;
            }
            self.query::<()>(cmd("HDEL").arg(self.runs()).arg(&run)).await?;
        }
        Ok(())
    }

    /// The run ends: nothing of it is left but the copies that the caller removes.
    pub(super) async fn leave(&self) -> RedisResult<()> {
        self.query::<()>(cmd("UNLINK").arg(lease_of(&self.run))).await?;
        self.query(cmd("HDEL").arg(self.runs()).arg(&self.run)).await
    }

    /// As messages name it.
    pub(super) fn named(&self, copy: u64) -> String {
        format!("{} of {}", key_of(&self.run, copy), self.name)
    }

    fn runs(&self) -> String {
        format!("quire:runs:{}", self.user)
    }

    async fn query<T: FromRedisValue>(&self, command: &Cmd) -> RedisResult<T> {
        match &self.connection {
            Connection::One(connection) => command.query_async(&mut connection.clone()).await,
            Connection::Cluster(cluster) => command.query_async(&mut cluster.clone()).await,
        }
    }

    async fn send<T: FromRedisValue>(&self, pipe: &Pipeline) -> RedisResult<T> {
        match &self.writes {
            Connection::One(connection) => pipe.query_async(&mut connection.clone()).await,
            Connection::Cluster(cluster) => pipe.query_async(&mut cluster.clone()).await,
        }
    }
}

/// The copies of one are on one server.
pub(super) fn group_of(copy: u64) -> usize {
    copy as usize % GROUPS
}

fn key_of(run: &str, copy: u64) -> String {
    format!("quire:{{{run}.{}}}:{copy}", group_of(copy))
}

fn lease_of(run: &str) -> String {
    format!("quire:{{{run}}}:lease")
}

/// What a URL names, with the password that the environment has for it, as `redis-cli` takes it.
fn connection_info(address: &str) -> Result<ConnectionInfo> {
    // The address is not repeated: it may have a password.
    let info = address
        .into_connection_info()
        .context("an address of --far is none: give redis://HOST:PORT or rediss://HOST:PORT")?;
    let settings = info.redis_settings();
    match std::env::var("REDISCLI_AUTH") {
        Ok(password) if !password.is_empty() && settings.password().is_none() => {
            let settings = settings.clone().set_password(password);
            Ok(info.set_redis_settings(settings))
        }
        _ => Ok(info),
    }
}

fn shown(info: &ConnectionInfo) -> String {
    info.addr().to_string()
}

async fn open(infos: &[ConnectionInfo], name: &str) -> Result<Connection> {
    // An error of another kind is told by the first command.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let config = ConnectionManagerConfig::new()
        .set_number_of_retries(2)
        .set_max_delay(Duration::from_secs(1))
        .set_connection_timeout(Some(CONNECTED_WITHIN))
        .set_response_timeout(Some(ANSWER_WITHIN));
    let mut refusal = None;
    for info in infos {
        let client = Client::open(info.clone().set_tcp_settings(tcp_settings()))?;
        let mut connection = match client.get_connection_manager_with_config(config.clone()).await {
            Ok(connection) => connection,
            Err(error) => {
                refusal = Some(error);
                continue;
            }
        };
        let info = cmd("INFO").arg("cluster").query_async(&mut connection).await;
        let info: String = info.map_err(told)?;
        if field(&info, "cluster_enabled") == Some("1") {
            let client = ClusterClientBuilder::new(infos.to_vec())
                .connection_timeout(CONNECTED_WITHIN)
                .response_timeout(ANSWER_WITHIN)
                .tcp_settings(tcp_settings())
                .build()?;
            return Ok(Connection::Cluster(client.get_async_connection().await.map_err(told)?));
        }
        if infos.len() > 1 {
            bail!("they are no cluster; name one server");
        }
        return Ok(Connection::One(connection));
    }
    let refusal = refusal.map_or_else(|| anyhow::anyhow!("no address is given"), told);
    Err(refusal.context(format!("{name} cannot be reached")))
}

/// A peer that vanished without a word is noticed, and connected to again.
fn tcp_settings() -> TcpSettings {
    TcpSettings::default().set_nodelay(true).set_user_timeout(CONNECTED_WITHIN)
}

/// A server's refusal, and what would help.
fn told(error: RedisError) -> anyhow::Error {
    let needs_password = matches!(error.code(), Some("NOAUTH" | "WRONGPASS"))
        || error.kind() == ErrorKind::AuthenticationFailed;
    let hint = if needs_password { "; give the password in REDISCLI_AUTH" } else { "" };
    anyhow::anyhow!("{error}{hint}")
}

/// A line of what INFO says.
fn field<'a>(info: &'a str, name: &str) -> Option<&'a str> {
    info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
}

fn replicas(info: &str) -> u32 {
    field(info, "connected_slaves").and_then(|number| number.parse().ok()).unwrap_or(0)
}

/// Whether a server that says so may do better when it is asked again.
pub(super) fn may_pass(error: &RedisError) -> bool {
    let is_final =
        matches!(error.kind(), ErrorKind::UnexpectedReturnType | ErrorKind::InvalidClientConfig);
    !is_final && error.code() != Some("WRONGTYPE")
}
