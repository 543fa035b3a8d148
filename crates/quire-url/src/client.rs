//! The object on the server: which one it is, and ranges of its bytes.

use std::env::{var, var_os};
use std::error::Error;
use std::net::{SocketAddr, TcpStream};
use std::ops::Range;
use std::time::{Duration, Instant};

use bytes::Bytes;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::http::HttpBuilder;
use object_store::path::Path;
use object_store::{
    Certificate, ClientOptions, GetOptions, ObjectMeta, ObjectStore, ObjectStoreExt as _,
    RetryConfig,
};
use quire::store::Cause;
use rustix::io::Errno;

use crate::credentials::Profile;
use crate::{is_url, shown};

/// How long a request is tried again, after errors that may pass.
pub(crate) const RETRIED_FOR: Duration = Duration::from_secs(30);
/// How long nothing may come of an answer.
const SILENT_FOR: Duration = Duration::from_secs(15);
const CONNECT_FOR: Duration = Duration::from_secs(5);
/// Where a machine in Amazon's cloud learns its credentials.
const INSTANCE_METADATA: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::new(169, 254, 169, 254)), 80);

/// One object of a server, as it was when it was opened.
pub(crate) struct Client {
    place: Place,
    pub opened: ObjectMeta,
}

/// Where an object is.
struct Place {
    store: Box<dyn ObjectStore>,
    path: Path,
    /// What of the URL may be secret, and is not shown.
    query: Option<String>,
    is_s3: bool,
}

/// What a URL names.
pub(crate) struct Named {
    /// As messages show it: without what may be secret.
    pub name: String,
    scheme: String,
    host: String,
    path: String,
    query: Option<String>,
}

impl Named {
    /// # Errors
    /// [`Cause::Unsupported`].
    pub fn parse(url: &str) -> Result<Named, Cause> {
        if !is_url(url) {
            let why = "it is no URL of an object; give s3://BUCKET/KEY or https://HOST/PATH";
            return Err(Cause::Unsupported(why.into()));
        }
        let bare = shown(url);
        let query = url[bare.len()..].strip_prefix('?').and_then(|rest| rest.split('#').next());
        let query = query.filter(|query| !query.is_empty()).map(str::to_owned);
        let (scheme, rest) = bare.split_once("://").unwrap_or_default();
        let scheme = scheme.to_ascii_lowercase();
        let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
        if host.contains('@') {
            let why = "a URL is seen by other programs, so it must not have a password in it; use a \
                       URL that is signed for a time, or s3://";
            return Err(Cause::Unsupported(why.into()));
        }
        if host.is_empty() || path.is_empty() {
            let why = "it names no object; give s3://BUCKET/KEY or https://HOST/PATH";
            return Err(Cause::Unsupported(why.into()));
        }
        let name = format!("{scheme}://{host}/{path}");
        Ok(Named { name, scheme, host: host.into(), path: path.into(), query })
    }
}

impl Client {
    /// Asks the server which object it has under that name.
    ///
    /// # Errors
    /// What the server says, or that nothing can be asked of it.
    pub async fn open(named: &Named) -> Result<Client, Cause> {
        // One that the program has installed for itself is as good.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let is_s3 = named.scheme == "s3";
        let (store, path): (Box<dyn ObjectStore>, Path) = if is_s3 {
            let path = Path::parse(&named.path).map_err(unusable)?;
            if path.as_ref() != named.path {
                let why = "a key that begins or ends with / is not reached; name another object";
                return Err(Cause::Unsupported(why.into()));
            }
            (Box::new(s3(&named.host)?), path)
        } else {
            let query = named.query.as_ref().map_or_else(String::new, |query| format!("?{query}"));
            let options = client_options().with_allow_http(named.scheme == "http");
            let web = HttpBuilder::new()
                .with_url(format!("{}{query}", named.name))
                .with_client_options(options)
                .with_retry(retry())
                .build();
            let why = "it is no URL of a web server; correct it";
            (Box::new(web.map_err(|_| Cause::Unsupported(why.into()))?), Path::default())
        };
        let place = Place { store, path, query: named.query.clone(), is_s3 };
        let client = Client { opened: place.ask().await?, place };
        if client.strong_tag().is_none() && !client.has_time() {
            let why = "the server tells neither an ETag nor a time of the object, so one that was \
                       replaced could not be told from it; fetch it to a file first";
            return Err(Cause::Unsupported(why.into()));
        }
        Ok(client)
    }

    /// The bytes of a range that lies in the object and is not empty.
    ///
    /// # Errors
    /// [`Cause::Replaced`], or what the server says.
    pub async fn get(&self, range: Range<u64>) -> Result<Bytes, Cause> {
        let since = Instant::now();
        loop {
            // What is torn goes on where it was only by an ETag; without one it is asked for again.
            match self.get_once(range.clone()).await {
                Err(Cause::Server { errno: Errno::IO, .. })
                    if self.strong_tag().is_none() && since.elapsed() < RETRIED_FOR =>
                {
                    tokio::time::sleep(Duration::from_millis(500)).await;
                }
                result => return result,
            }
        }
    }

    async fn get_once(&self, range: Range<u64>) -> Result<Bytes, Cause> {
        let tag = self.strong_tag();
        let is_by_time = tag.is_none();
        let options = GetOptions {
            if_match: tag.cloned(),
            if_unmodified_since: is_by_time.then_some(self.opened.last_modified),
            range: Some(range.clone().into()),
            ..GetOptions::default()
        };
        let answer = self.place.store.get_opts(&self.place.path, options).await;
        let answer = answer.map_err(|error| self.place.cause_of_read(&error))?;
        // A server may know no conditions.
        let found = &answer.meta;
        if found.size != self.opened.size
            || found.e_tag != self.opened.e_tag
            || (is_by_time && found.last_modified != self.opened.last_modified)
        {
            return Err(replaced());
        }
        let bytes = answer.bytes().await.map_err(|error| self.place.cause_of_read(&error))?;
        if bytes.len() as u64 != range.end - range.start {
            let why = format!(
                "the server sent {} bytes instead of {}; ask again",
                bytes.len(),
                range.end - range.start
            );
            return Err(Cause::Server { errno: Errno::IO, why });
        }
        Ok(bytes)
    }

    /// What tells this object from others that had or will have its name.
    pub fn identity(&self) -> String {
        let ObjectMeta { size, e_tag, last_modified, .. } = &self.opened;
        let time = self.strong_tag().is_none().then(|| last_modified.timestamp_micros());
        // A signature is another one each time; anything else may name another object.
        let query = self.place.query.iter().flat_map(|query| query.split('&'));
        let named: Vec<&str> = query.filter(|pair| !is_signature(pair)).collect();
        format!("{size} {e_tag:?} {time:?} {named:?}")
    }

    /// The ETag, if the server promises that it is another with each change of a byte.
    fn strong_tag(&self) -> Option<&String> {
        self.opened.e_tag.as_ref().filter(|tag| !tag.starts_with("W/"))
    }

    fn has_time(&self) -> bool {
        self.opened.last_modified.timestamp() != 0
    }
}

impl Place {
    async fn ask(&self) -> Result<ObjectMeta, Cause> {
        use object_store::Error::{NotFound, PermissionDenied};
        match self.store.head(&self.path).await {
            Ok(meta) if meta.e_tag.is_some() => return Ok(meta),
            Ok(_) => {}
            // A URL that is signed for GET allows no HEAD, and some servers know none.
            Err(PermissionDenied { .. } | NotFound { .. }) if !self.is_s3 => {}
            Err(error) => return Err(self.cause(&error)),
        }
        // Only the head of the answer is taken. Some servers tell the ETag only here.
        let answer = self.store.get(&self.path).await;
        answer.map(|answer| answer.meta).map_err(|error| self.cause(&error))
    }

    fn cause_of_read(&self, error: &object_store::Error) -> Cause {
        match error {
            object_store::Error::NotFound { .. } => {
                Cause::Replaced("the server has no such object any more".into())
            }
            object_store::Error::Precondition { .. } => replaced(),
            _ => {
                // The same, where an answer was torn and went on.
                let mut inner = error.source();
                while let Some(source) = inner {
                    if let Some(error) = source.downcast_ref::<object_store::Error>() {
                        return self.cause_of_read(error);
                    }
                    inner = source.source();
                }
                self.cause(error)
            }
        }
    }

    /// What a server or the client says, in one line, without what may be secret: of an answer in XML, in
    /// which S3 repeats an expired token, the code alone.
    fn shown(&self, text: &str) -> String {
        let (said, answer) = text.split_at(text.find('<').unwrap_or(text.len()));
        let code = answer.split_once("<Code>").and_then(|(_, rest)| rest.split_once("</Code>"));
        let mut said = format!("{said}{}", code.map_or("", |(code, _)| code));
        for pair in self.query.iter().flat_map(|query| query.split('&')) {
            let value = pair.split_once('=').map_or(pair, |(_, value)| value);
            if value.len() > 3 {
                said = said.replace(value, "...");
            }
        }
        said.chars().filter(|sign| !sign.is_control()).take(300).collect()
    }

    fn cause(&self, error: &object_store::Error) -> Cause {
        let server = |errno, why: &str| Cause::Server { errno, why: why.into() };
        match error {
            object_store::Error::NotFound { .. } => server(
                Errno::NOENT,
                "the server has no such object; check the name, and for s3:// the region or endpoint \
                 (AWS_REGION, AWS_ENDPOINT_URL)",
            ),
            object_store::Error::PermissionDenied { .. }
            | object_store::Error::Unauthenticated { .. } => server(
                Errno::ACCESS,
                if self.is_s3 {
                    "the server refuses it; check the credentials (AWS_ACCESS_KEY_ID and \
                     AWS_SECRET_ACCESS_KEY, or AWS_PROFILE), and that they may read this object"
                } else {
                    "the server refuses it; check that the URL is whole, and valid still"
                },
            ),
            object_store::Error::NotSupported { .. } => Cause::Unsupported(
                "the server sends no parts of an object (it answers no range requests), so that it \
                 cannot be mapped; fetch it to a file first"
                    .into(),
            ),
            _ => {
                let mut innermost: &dyn Error = error;
                while let Some(source) = innermost.source() {
                    innermost = source;
                }
                let found = self.shown(&innermost.to_string());
                let is_late = found.contains("timed out");
                let errno = if is_late { Errno::TIMEDOUT } else { Errno::IO };
                let why = format!(
                    "{}, also when asked again for {} s; check the server and the network, and ask again",
                    found.trim_end_matches([':', ' ']),
                    RETRIED_FOR.as_secs()
                );
                Cause::Server { errno, why }
            }
        }
    }
}

/// Whether a part of a URL's query belongs to its signature.
fn is_signature(pair: &str) -> bool {
    let name = pair.split('=').next().unwrap_or(pair);
    let names = ["Signature", "Expires", "AWSAccessKeyId", "Policy", "Key-Pair-Id"];
    name.starts_with("X-Amz-") || names.contains(&name)
}

fn replaced() -> Cause {
    Cause::Replaced("the server has another object under this name than the one opened".into())
}

fn unusable(error: impl Error) -> Cause {
    Cause::Unsupported(format!("it cannot be used: {error}; correct the URL or the settings"))
}

fn retry() -> RetryConfig {
    RetryConfig { max_retries: usize::MAX, retry_timeout: RETRIED_FOR, ..RetryConfig::default() }
}

fn client_options() -> ClientOptions {
    ClientOptions::new()
        .with_timeout_disabled()
        .with_read_timeout(SILENT_FOR)
        .with_connect_timeout(CONNECT_FOR)
}

/// A bucket, by the environment that the AWS tools read, or else by their files.
fn s3(bucket: &str) -> Result<impl ObjectStore + use<>, Cause> {
    let mut options = client_options();
    if let Some(path) = var_os("AWS_CA_BUNDLE") {
        let bundle = std::fs::read(&path).map_err(unusable)?;
        for certificate in Certificate::from_pem_bundle(&bundle).map_err(unusable)? {
            options = options.with_root_certificate(certificate);
        }
    }
    let mut builder = AmazonS3Builder::from_env().with_bucket_name(bucket).with_retry(retry());
    let profile = Profile::read().map_err(Cause::Unsupported)?;
    let settings =
        [(AmazonS3ConfigKey::Region, "region"), (AmazonS3ConfigKey::Endpoint, "endpoint_url")];
    for (key, name) in settings {
        let is_set = builder.get_config_value(&key).is_some_and(|value| !value.is_empty());
        if let Some(value) = profile.get(name).filter(|_| !is_set) {
            builder = builder.with_config(key, value);
        }
    }
    let others = [
        "AWS_SKIP_SIGNATURE",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    ];
    if builder.get_config_value(&AmazonS3ConfigKey::AccessKeyId).is_none() {
        match (profile.get("aws_access_key_id"), profile.get("aws_secret_access_key")) {
            (Some(key), Some(secret)) => {
                builder = builder.with_access_key_id(key).with_secret_access_key(secret);
                if let Some(token) = profile.get("aws_session_token") {
                    builder = builder.with_token(token);
                }
            }
            _ if others.iter().any(|name| var_os(name).is_some()) || is_in_the_cloud() => {}
            _ => {
                let why = "there are no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, \
                           or AWS_PROFILE, or for a public bucket AWS_SKIP_SIGNATURE=true";
                return Err(Cause::Unsupported(why.into()));
            }
        }
    }
    // Who names such an endpoint wants it.
    let endpoints = [AmazonS3ConfigKey::Endpoint, AmazonS3ConfigKey::S3Endpoint];
    let is_plain = endpoints
        .iter()
        .any(|key| builder.get_config_value(key).is_some_and(|url| url.starts_with("http://")));
    builder.with_client_options(options.with_allow_http(is_plain)).build().map_err(unusable)
}

/// Whether a machine has a service of the cloud's for its credentials.
fn is_in_the_cloud() -> bool {
    let is_disabled = var("AWS_EC2_METADATA_DISABLED").is_ok_and(|value| value == "true");
    let has_own = var_os("AWS_METADATA_ENDPOINT").is_some();
    has_own
        || !is_disabled
            && TcpStream::connect_timeout(&INSTANCE_METADATA, Duration::from_secs(1)).is_ok()
}
