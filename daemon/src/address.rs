//! Addresses in a configuration: where a daemon listens, and what it tells others to dial.
//!
//! The two are settings of their own, because a wildcard is right for the one and useless for the
//! other: a node that announces `0.0.0.0` is registered and unreachable. Rules:
//!
//! - a bind beyond loopback without TLS needs `insecure = true` ([`check_listen`]);
//! - what is announced is never a wildcard, and loopback only where the daemon listens there too
//!   ([`check_advertise`]).

use std::{
    fmt,
    io::{self, Write},
    net::{IpAddr, Ipv6Addr, SocketAddr, ToSocketAddrs},
    str::FromStr,
    sync::atomic::{AtomicBool, Ordering},
};

use tokio::net::{TcpListener, lookup_host};

use crate::config::Rules;

/// A host and a port: `127.0.0.1:7400`, `[::1]:7400`, `master-1:7400`. The name is looked up when
/// it is used, not when it is read, so a peer that is not up yet can be named.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct HostPort {
    /// A name or an IP address, without brackets.
    pub host: String,
    /// Port 0 lets the system choose where it is listened on.
    pub port: u16,
}

/// Where a daemon listens. A wildcard (`0.0.0.0`, `[::]`) and port 0 are allowed.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ListenAddress(pub HostPort);

/// What a daemon tells others to dial. Port 0 stands for the port that is listened on.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct AdvertiseAddress(pub HostPort);

/// Why a text is no address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// No colon with a port behind it.
    #[error("{0:?} has no port")]
    NoPort(String),
    /// What stands behind the last colon is no port.
    #[error("{0:?} is no port from 0 to 65535")]
    BadPort(String),
    /// Nothing before the colon, or characters that no host name and no IP address has.
    #[error("{0:?} is no host name and no IP address")]
    BadHost(String),
    /// A wildcard where others need something to dial.
    #[error("{0} is a wildcard, which nobody can dial")]
    Wildcard(IpAddr),
}

/// An address that cannot be listened on.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// The host name has no address.
    #[error("look up {address} to listen for {what}")]
    Resolve {
        /// What it was for: `metrics`, `control`, `data`.
        what: &'static str,
        /// As configured.
        address: HostPort,
        /// What the resolver says.
        source: io::Error,
    },
    /// The system refuses, mostly because another process listens there.
    #[error("listen on {address} for {what} (--{what}.listen takes another address, or port 0)")]
    Bind {
        /// What it was for; its address is the key `listen` in the table of that name.
        what: &'static str,
        /// As configured.
        address: HostPort,
        /// What the system says.
        source: io::Error,
    },
}

impl HostPort {
    /// A host, as a name or an IP address without brackets, and a port.
    pub fn new(host: impl Into<String>, port: u16) -> Self {
        Self { host: host.into(), port }
    }

    /// The host, if it is written as an IP address.
    pub fn ip(&self) -> Option<IpAddr> {
        self.host.parse().ok()
    }

    /// Looks the name up. At least one address comes back. Blocks for names, not for IP addresses:
    /// for the check at start; tasks use [`HostPort::resolve`].
    ///
    /// # Errors
    /// What the resolver says, or that the name has no address.
    pub fn resolve_blocking(&self) -> io::Result<Vec<SocketAddr>> {
        not_empty((self.host.as_str(), self.port).to_socket_addrs()?.collect())
    }

    /// Looks the name up. At least one address comes back.
    ///
    /// # Errors
    /// What the resolver says, or that the name has no address.
    pub async fn resolve(&self) -> io::Result<Vec<SocketAddr>> {
        not_empty(lookup_host((self.host.as_str(), self.port)).await?.collect())
    }
}

impl ListenAddress {
    /// Port `port` of loopback: the default of everything that listens.
    pub fn loopback(port: u16) -> Self {
        Self(HostPort::new("127.0.0.1", port))
    }

    /// Binds, and announces the bound address as [`announce`] does. Must be called on the runtime.
    ///
    /// # Errors
    /// The name has no address, or none of its addresses can be listened on.
    pub async fn bind(&self, what: &'static str) -> Result<(TcpListener, SocketAddr), BindError> {
        let addresses = self.0.resolve().await.map_err(|source| BindError::Resolve {
            what,
            address: self.0.clone(),
            source,
        })?;
        let bind = |source| BindError::Bind { what, address: self.0.clone(), source };
        let listener = TcpListener::bind(&addresses[..]).await.map_err(bind)?;
        let bound = listener.local_addr().map_err(bind)?;
        announce(what, &bound);
        Ok((listener, bound))
    }
}

impl AdvertiseAddress {
    /// What to announce for a socket that listens on `bound`: the configured address, its port 0
    /// replaced, or `bound` itself where nothing is configured.
    pub fn for_bound(configured: Option<&Self>, bound: SocketAddr) -> HostPort {
        match configured {
            None => HostPort::new(bound.ip().to_string(), bound.port()),
            Some(Self(HostPort { host, port: 0 })) => HostPort::new(host, bound.port()),
            Some(Self(address)) => address.clone(),
        }
    }
}

/// Whether [`announce`] prints. A process that `launch` started owns its standard output; one that
/// embeds a daemon, as tests do, has its own use for it.
static ANNOUNCE_ON_STDOUT: AtomicBool = AtomicBool::new(false);

/// From here on [`announce`] prints.
pub(crate) fn announce_on_stdout() {
    ANNOUNCE_ON_STDOUT.store(true, Ordering::Relaxed);
}

/// Tells where the daemon listens: a log event, and for scripts the line
/// `listening: metrics 127.0.0.1:41234` on standard output, whatever the log level. Needed wherever
/// port 0 was configured.
pub fn announce(what: &'static str, address: &dyn fmt::Display) {
    tracing::info!(what, %address, "listening");
    if ANNOUNCE_ON_STDOUT.load(Ordering::Relaxed) {
        // A closed standard output is no reason to stop serving.
        let mut stdout = io::stdout().lock();
        let _ = writeln!(stdout, "listening: {what} {address}");
        let _ = stdout.flush();
    }
}

/// The rule for a listening address: beyond loopback only with TLS, or with `insecure = true`.
/// The name must resolve.
pub fn check_listen(
    rules: &mut Rules<'_>,
    key: &str,
    listen: &ListenAddress,
    tls: bool,
    insecure: bool,
) {
    match listen.0.resolve_blocking() {
        Err(error) => {
            rules.key(key).must(false, format!("be an address of this host: {error}"));
        }
        Ok(addresses) => {
            let loopback =
                addresses.iter().all(|address| address.ip().to_canonical().is_loopback());
            rules.key(key).must(
                loopback || tls || insecure,
                "be a loopback address, because there is no TLS; insecure = true allows it anyway",
            );
        }
    }
}

/// The rule for an announced address: there is one that others can dial. Without `advertise` the
/// listening address is announced, which a wildcard cannot be.
pub fn check_advertise(
    rules: &mut Rules<'_>,
    key: &str,
    advertise: Option<&AdvertiseAddress>,
    listen_key: &str,
    listen: &ListenAddress,
) {
    let listens_on = listen.0.ip().map(|ip| ip.to_canonical());
    match advertise {
        None => {
            rules.key(key).must(
                !listens_on.is_some_and(|ip| ip.is_unspecified()),
                format!(
                    "be given, because {listen_key} = {listen} is a wildcard, which nobody can dial"
                ),
            );
        }
        Some(advertise) => {
            let announces_loopback = match advertise.0.resolve_blocking() {
                Ok(addresses) => addresses.iter().all(|at| at.ip().to_canonical().is_loopback()),
                // The name may be known to the others only.
                Err(_) => false,
            };
            let listens_beyond = listens_on.is_some_and(|ip| !ip.is_loopback());
            rules.key(key).should(
                !(announces_loopback && listens_beyond),
                format!("be reachable from other hosts, because {listen_key} = {listen} is"),
            );
        }
    }
}

fn not_empty(addresses: Vec<SocketAddr>) -> io::Result<Vec<SocketAddr>> {
    if addresses.is_empty() {
        return Err(io::Error::new(io::ErrorKind::NotFound, "the name has no address"));
    }
    Ok(addresses)
}

impl FromStr for HostPort {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let (host, port) =
            text.rsplit_once(':').ok_or_else(|| AddressError::NoPort(text.to_owned()))?;
        let bad_host = || AddressError::BadHost(host.to_owned());
        // `::1:80` would be an IPv6 address without a port just as well: brackets are needed.
        let host = match host.strip_prefix('[') {
            Some(rest) => {
                let inner = rest.strip_suffix(']').ok_or_else(bad_host)?;
                inner.parse::<Ipv6Addr>().map_err(|_| bad_host())?.to_string()
            }
            None if is_host_name(host) => host.to_owned(),
            None => return Err(bad_host()),
        };
        // `u16` reads a leading plus as well.
        let digits = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
        let number = port.parse().ok().filter(|_| digits);
        let port = number.ok_or_else(|| AddressError::BadPort(port.to_owned()))?;
        Ok(Self { host, port })
    }
}

fn is_host_name(host: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_');
    !host.is_empty() && host.len() <= 253 && host.bytes().all(allowed)
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port } = self;
        if host.contains(':') { write!(f, "[{host}]:{port}") } else { write!(f, "{host}:{port}") }
    }
}

impl FromStr for ListenAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        text.parse().map(Self)
    }
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for AdvertiseAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let address: HostPort = text.parse()?;
        match address.ip().map(|ip| ip.to_canonical()) {
            Some(ip) if ip.is_unspecified() => Err(AddressError::Wildcard(ip)),
            _ => Ok(Self(address)),
        }
    }
}

impl fmt::Display for AdvertiseAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

crate::text_setting!(HostPort, "HOST:PORT", "a host and a port, like 10.0.0.1:7400 or [::1]:7400");
crate::text_setting!(
    ListenAddress,
    "HOST:PORT",
    "an address to listen on, like 127.0.0.1:7400 or [::1]:7400"
);
crate::text_setting!(
    AdvertiseAddress,
    "HOST:PORT",
    "an address that others can dial, like 10.0.0.1:7402, and no wildcard"
);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn an_address_prints_as_a_text_that_reads_as_the_same(ip: IpAddr, port: u16) {
            let address = HostPort::new(ip.to_string(), port);
            prop_assert_eq!(address.to_string().parse(), Ok(address));
        }

        #[test]
        fn any_text_is_read_or_refused_without_panic(text in ".{0,32}") {
            let _ = text.parse::<HostPort>();
        }
    }

    #[test]
    fn what_is_no_host_and_port_is_refused_with_the_reason() {
        let refuse = |text: &str| text.parse::<HostPort>().unwrap_err();
        assert_eq!(refuse("localhost"), AddressError::NoPort("localhost".to_owned()));
        assert_eq!(refuse("localhost:http"), AddressError::BadPort("http".to_owned()));
        assert_eq!(refuse("localhost:70000"), AddressError::BadPort("70000".to_owned()));
        assert_eq!(refuse("localhost:+80"), AddressError::BadPort("+80".to_owned()));
        assert_eq!(refuse(":80"), AddressError::BadHost(String::new()));
        assert_eq!(refuse("::1:80"), AddressError::BadHost("::1".to_owned()));
        assert_eq!(refuse("[::1:80"), AddressError::BadHost("[::1".to_owned()));
        assert_eq!(refuse("http://host:80"), AddressError::BadHost("http://host".to_owned()));
    }

    #[test]
    fn the_announced_port_is_the_bound_one_unless_another_is_configured() {
        let bound = "127.0.0.1:41234".parse().unwrap();
        let announced = |text: Option<&str>| {
            let configured = text.map(|text| text.parse::<AdvertiseAddress>().unwrap());
            AdvertiseAddress::for_bound(configured.as_ref(), bound).to_string()
        };
        assert_eq!(announced(None), "127.0.0.1:41234");
        assert_eq!(announced(Some("node-1:0")), "node-1:41234");
        assert_eq!(announced(Some("node-1:7402")), "node-1:7402");
    }

    #[tokio::test]
    async fn a_name_without_address_is_told_with_its_purpose() {
        let listen = ListenAddress(HostPort::new("no-such-host.invalid", 0));
        let error = listen.bind("data").await.unwrap_err();
        assert_eq!(error.to_string(), "look up no-such-host.invalid:0 to listen for data");
    }
}
