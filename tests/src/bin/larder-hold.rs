//! A process that holds on to something until it is killed: for tests of what a node does then.
//!
//! `larder-hold lease SOCKET KEY` leases a part in place, says `holding`, and then closes its socket but
//! keeps reading the arena: it prints the first byte again for each line on its standard input.
//! `larder-hold reserve ADDRESS KEY BYTES` reserves a part, sends half of it, says `holding` and stalls.
#![forbid(unsafe_code)]

use larder_client::{connection::Identity, local::LocalSession};
use larder_proto::{
    BlockKey,
    frame::{Header, Op},
    wire::Wire,
};
use larder_tests::blocks;
use std::{io::BufRead, path::Path};
use tokio::{io::AsyncWriteExt, net::TcpStream};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["lease", socket, key] => lease(Path::new(socket), key.parse()?).await,
        ["reserve", address, key, bytes] => reserve(address, key.parse()?, bytes.parse()?).await,
        _ => Err("usage: larder-hold lease SOCKET KEY | reserve ADDRESS KEY BYTES".into()),
    }
}

async fn lease(socket: &Path, key: BlockKey) -> Result<(), Box<dyn std::error::Error>> {
    let session = LocalSession::connect(socket, &Identity::client("hold")).await?;
    let mut leased = session.lease(blocks::part(key)).await?.ok_or("the part is not there")?;
    println!("holding {}", leased[0]);
    let mut lines = std::io::stdin().lock().lines();
    if lines.next().is_some() {
        // The lease is kept as it is, its connection is not: as a reader whose event loop died.
        leased.detach();
        drop(session);
        println!("detached {}", leased[0]);
        for _ in lines.by_ref() {
            println!("read {}", leased[0]);
        }
    }
    Ok(())
}

async fn reserve(
    address: &str,
    key: BlockKey,
    bytes: usize,
) -> Result<(), Box<dyn std::error::Error>> {
    let mut stream = TcpStream::connect(address).await?;
    let hello = blocks::hello("hold")?.to_wire();
    let reserve = blocks::reserve(key, bytes).to_wire();
    let half = vec![0; bytes / 2];
    let mut message = Vec::new();
    for (op, request, body, payload) in [
        (Op::Hello, 1, hello.as_slice(), &[][..]),
        (Op::Reserve, 2, reserve.as_slice(), &[][..]),
        (Op::Data, 2, &[][..], half.as_slice()),
    ] {
        let body_len = u32::try_from(body.len())?;
        let mut header = Header::new(op, request, 0, body_len);
        header.payload_len = u32::try_from(payload.len())?;
        message.extend_from_slice(&header.encode());
        message.extend_from_slice(body);
        message.extend_from_slice(payload);
    }
    stream.write_all(&message).await?;
    println!("holding");
    std::future::pending::<()>().await;
    Ok(())
}
