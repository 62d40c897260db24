//! Questions to masters.
//!
//! Any connected master answers reads (P6), so a question goes to the one that answered last and, if that
//! one fails or is silent, to the others in turn. Every call has a deadline; dead connections are found
//! by pings (F19).

use crate::error::ClientError;
use bytes::Bytes;
use futures_util::future::join_all;
use larder_proto::{
    BlockKey, block_key,
    control::{self, master_client::MasterClient},
    fingerprint::ModelDescription,
    wire::Wire,
};
use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};
use tokio::time::timeout;
use tonic::{
    Code, Response, Status,
    transport::{Channel, Endpoint},
};

/// How long one master may take to answer a question.
pub const CALL_DEADLINE: Duration = Duration::from_secs(2);
/// Who is asked here, in [`describe`].
const MASTER: &str = "a master (its control port, 7400 by default)";
/// How long a connection attempt may take.
const CONNECT_DEADLINE: Duration = Duration::from_secs(1);
/// How often a connection is pinged, and how long the answer may take.
const PING: Duration = Duration::from_secs(4);

/// Keys as questions carry them: one behind the other, 32 bytes each.
pub fn packed_keys(keys: &[BlockKey]) -> Bytes {
    let mut packed = Vec::with_capacity(keys.len() * 32);
    keys.iter().for_each(|key| key.put(&mut packed));
    packed.into()
}

/// A handle of all configured masters; clones share their connections.
#[derive(Debug, Clone)]
pub struct Masters {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    masters: Vec<(String, MasterClient<Channel>)>,
    /// The one that answered last.
    preferred: AtomicUsize,
}

impl Masters {
    /// Masters at these addresses (`host:port`). Connects when it is first asked, so it never fails for
    /// a master that is down now. Has to be called within a runtime.
    pub fn new(addresses: &[String]) -> Result<Self, ClientError> {
        let client = |address: &String| Ok((address.clone(), MasterClient::new(channel(address)?)));
        let masters = addresses.iter().map(client).collect::<Result<_, ClientError>>()?;
        let preferred = AtomicUsize::new(0);
        Ok(Self { shared: Arc::new(Shared { masters, preferred }) })
    }

    /// Whether no master is configured: then this host stands alone.
    pub fn is_empty(&self) -> bool {
        self.shared.masters.is_empty()
    }

    /// The configured addresses.
    pub fn addresses(&self) -> impl Iterator<Item = &str> {
        self.shared.masters.iter().map(|(address, _)| address.as_str())
    }

    /// Asks one master after the other until one answers. An answer that would be the same from any
    /// master (not found, not allowed) is final.
    pub async fn ask<T, F>(
        &self,
        call: impl FnMut(MasterClient<Channel>) -> F,
    ) -> Result<T, ClientError>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        self.ask_within(CALL_DEADLINE, call).await
    }

    /// As [`Self::ask`], for questions that a master itself has to ask nodes about: each master may take
    /// `deadline`.
    pub async fn ask_within<T, F>(
        &self,
        deadline: Duration,
        mut call: impl FnMut(MasterClient<Channel>) -> F,
    ) -> Result<T, ClientError>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let Shared { masters, preferred } = &*self.shared;
        let first = preferred.load(Ordering::Relaxed);
        let mut errors = Vec::new();
        for i in 0..masters.len() {
            let at = (first + i) % masters.len();
            let (address, client) = &masters[at];
            match timeout(deadline, call(client.clone())).await {
                Ok(Ok(answer)) => {
                    preferred.store(at, Ordering::Relaxed);
                    return Ok(answer.into_inner());
                }
                Ok(Err(status)) if is_final(status.code()) => {
                    let message = status.message().to_owned();
                    return Err(match status.code() {
                        Code::InvalidArgument => ClientError::Invalid(message),
                        _ => ClientError::Refused(message),
                    });
                }
                Ok(Err(status)) => {
                    errors.push(format!("{address}: {}", describe(&status, MASTER)));
                }
                Err(_) => {
                    // The next question begins with another master.
                    preferred.store((at + 1) % masters.len(), Ordering::Relaxed);
                    errors.push(format!("{address}: no answer within {deadline:?}"));
                }
            }
        }
        if errors.is_empty() {
            errors.push("none is configured".to_owned());
        }
        Err(ClientError::Masters(errors))
    }

    /// Asks every master at the same time; the answer of each, or why there is none.
    pub async fn ask_each<T, F>(
        &self,
        call: impl Fn(MasterClient<Channel>) -> F,
    ) -> Vec<(String, Result<T, String>)>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let asks = self.shared.masters.iter().map(|(address, client)| {
            let asked = timeout(CALL_DEADLINE, call(client.clone()));
            async move {
                let answer = match asked.await {
                    Ok(Ok(answer)) => Ok(answer.into_inner()),
                    Ok(Err(status)) => Err(describe(&status, MASTER)),
                    Err(_) => Err(format!("no answer within {CALL_DEADLINE:?}")),
                };
                (address.clone(), answer)
            }
        });
        join_all(asks).await
    }

    /// Tells every master of a model version; the first error, if any master did not take it.
    pub async fn register(&self, model: &ModelDescription) -> Result<(), ClientError> {
        let request = registration(model);
        let mut errors = Vec::new();
        for (address, client) in &self.shared.masters {
            let mut client = client.clone();
            match timeout(CALL_DEADLINE, client.register_model(request.clone())).await {
                Ok(Ok(_)) => {}
                Ok(Err(status)) => errors.push(format!("{address}: {}", describe(&status, MASTER))),
                Err(_) => errors.push(format!("{address}: no answer within {CALL_DEADLINE:?}")),
            }
        }
        match errors.is_empty() {
            true => Ok(()),
            false => Err(ClientError::Masters(errors)),
        }
    }
}

/// A connection to a gRPC service at `address` (`host:port`): connects when it is first used, and pings
/// when idle. Has to be called within a runtime.
pub fn channel(address: &str) -> Result<Channel, ClientError> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))
        .map_err(|_| ClientError::Invalid(format!("{address} is not host:port")))?
        .connect_timeout(CONNECT_DEADLINE)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(PING)
        .keep_alive_timeout(PING)
        .keep_alive_while_idle(true);
    Ok(endpoint.connect_lazy())
}

/// What a master is told of a model version.
pub(crate) fn registration(model: &ModelDescription) -> control::RegisterModelRequest {
    control::RegisterModelRequest {
        display_name: model.display_name.clone(),
        content: model.content.encode().into(),
        layout: model.layout.encode().into(),
        key_check: block_key::self_check().as_bytes().to_vec().into(),
    }
}

/// Whether every master would say the same.
fn is_final(code: Code) -> bool {
    matches!(
        code,
        Code::InvalidArgument | Code::NotFound | Code::PermissionDenied | Code::Unauthenticated
    )
}

/// Why a question was not answered: the message of a status, and what is at the bottom of it. What lies
/// between says the same again. `who` was asked: `a master`, `a node`.
pub fn describe(status: &Status, who: &str) -> String {
    let mut cause = std::error::Error::source(status);
    while let Some(deeper) = cause.and_then(std::error::Error::source) {
        cause = Some(deeper);
    }
    let text = match cause {
        Some(cause) => format!("{}: {cause}", status.message()),
        None => status.message().to_owned(),
    };
    match not_the_one(status.code(), &text) {
        Some(why) => format!("this is not {who}: {why}"),
        // One that dies looks the same as somebody who understands nothing.
        None if ["broken pipe", "connection reset"].iter().any(|end| text.contains(end)) => {
            format!("{text}; it died, or this is not {who}")
        }
        None => text,
    }
}

/// What else listens there, if what came back tells that.
fn not_the_one(code: Code, text: &str) -> Option<&'static str> {
    // What an HTTP/1 server or a data plane says is no HTTP/2 frame.
    if text.contains("frame with invalid size") {
        return Some("what listens there does not speak gRPC");
    }
    // An HTTP/2 server without the service: of another kind, or a web server (404).
    (code == Code::Unimplemented).then_some("another service answers there, or another version")
}
