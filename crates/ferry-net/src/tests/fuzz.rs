//! Whatever bytes come: an error or a message, which means the same bytes again.

use proptest::prelude::*;

use super::*;
use crate::codec::{Wire, decode};
use crate::frame;
use crate::message::{Acknowledged, Caller, Outcome, ToClient, ToServer, VERSION};

/// A message's bytes are the only ones that mean it, so nothing that was taken is anything but what
/// was sent.
fn one_form<T: Wire + std::fmt::Debug>(bytes: &[u8]) {
    if let Ok(message) = decode::<T>(bytes) {
        assert_eq!(&frame::encode(&message)[4..], bytes, "{message:?}");
    }
}

/// Bytes that look like messages: small numbers are tags, counts and flags.
fn likely() -> impl Strategy<Value = Vec<u8>> {
    let byte = prop_oneof![4 => Just(0_u8), 3 => 0_u8..16, 2 => 32_u8..54, 1 => any::<u8>()];
    proptest::collection::vec(byte, 0..200)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes_are_a_message_or_an_error(bytes in likely()) {
        one_form::<ToServer>(&bytes);
        one_form::<ToClient>(&bytes);
    }

    #[test]
    fn every_operation_survives_encoding_and_decoding(tag in 0_u8..64, bytes in likely()) {
        // Behind a valid head, every operation and outcome is reached.
        let mut request = vec![2];
        (1_u64).put(&mut request);
        (0_u64).put(&mut request);
        Caller::default().put(&mut request);
        request.push(tag);
        request.extend_from_slice(&bytes);
        one_form::<ToServer>(&request);
        let mut reply = vec![3];
        (1_u64).put(&mut reply);
        reply.push(tag % 32);
        reply.extend_from_slice(&bytes);
        one_form::<ToClient>(&reply);
        if let Ok(ToServer::Request { id, after, caller, op }) = decode(&request) {
            prop_assert_eq!(frame::encode_request(id, after, caller, &op)[4..].to_vec(), request);
            let acknowledged = (id % 2 == 0)
                .then_some(Acknowledged { at: Timestamp(7), ino: after });
            let (seq, answered, epoch) = (5, 4, 3);
            let encoded = frame::encode_change((seq, answered, epoch), acknowledged, caller, &op);
            let change = ToServer::Change { seq, answered, epoch, acknowledged, caller, op };
            prop_assert_eq!(encoded, frame::encode(&change));
        }
    }

    #[test]
    fn a_decoded_list_is_bounded_by_its_message(count in 1_u32.., rest in likely()) {
        let mut bytes = vec![3];
        (1_u64).put(&mut bytes);
        bytes.push(7);
        count.put(&mut bytes);
        bytes.extend_from_slice(&rest);
        if let Ok(ToClient::Reply { outcome: Outcome::Listing { names }, .. }) = decode(&bytes) {
            prop_assert!(names.0.len() <= rest.len());
        }
    }
}

/// Bytes like those of `likely`.
fn random_bytes(random: &Random, most: u64) -> Vec<u8> {
    let byte = |_| match random.below(10) {
        0..4 => 0,
        4..7 => random.below(16),
        7..9 => 32 + random.below(32),
        _ => random.below(256),
    };
    (0..random.below(most)).map(byte).map(|byte| byte as u8).collect()
}

/// A client that greets, sends some messages with random operations, and leaves.
fn session_of_garbage(world: &World, runtime: &tokio::runtime::Runtime, random: &Random) {
    let (mut ours, theirs) = duplex(1 << 16);
    world.server().serve_stream(Box::new(theirs));
    let mut bytes = Vec::new();
    let hello = ToServer::Hello {
        version: VERSION,
        session: 0,
        path: b"/".to_vec(),
        name: Vec::new(),
        newest: random.below(3),
    };
    bytes.extend(frame::encode(&hello));
    for id in 1..=1 + random.below(20) {
        // A request whose operation is random bytes behind a valid tag.
        let is_change = random.below(2) == 0;
        let mut message = vec![if is_change { 3 } else { 2 }];
        id.put(&mut message);
        0_u64.put(&mut message);
        if is_change {
            0_u32.put(&mut message);
            let acknowledged = Acknowledged { at: Timestamp(0), ino: random.below(4) };
            (random.below(3) == 0).then_some(acknowledged).put(&mut message);
        }
        Caller::default().put(&mut message);
        message.push(random.below(64) as u8);
        message.extend(
            (0..random.below(60)).map(|_| (random.next() >> (random.below(8) * 8)) as u8 % 8),
        );
        bytes.extend((message.len() as u32).to_le_bytes());
        bytes.extend(message);
    }
    if random.below(4) == 0 {
        let message = random_bytes(random, 100);
        bytes.extend((message.len() as u32).to_le_bytes());
        bytes.extend(message);
    }
    runtime.block_on(async {
        let _closed = ours.write_all(&bytes).await;
        let _closed = ours.shutdown().await;
    });
}

#[test]
fn a_server_survives_any_bytes() {
    let world = World::new(30);
    let honest = world.client();
    let random = Random::new(30);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    for round in 0..200 {
        session_of_garbage(&world, &runtime, &random);
        if round % 20 == 0 {
            honest.lookup(ROOT, "x").unwrap();
        }
    }
    honest.create(ROOT, "well").unwrap();
}

/// `FUZZ_SECONDS=3600 FUZZ_SEED=1 cargo test --release -p ferry-net --lib fuzz -- --ignored
/// --nocapture`
#[test]
#[ignore = "as long as one wants"]
fn for_so_many_seconds() {
    let number = |name: &str, or: u64| std::env::var(name).map_or(or, |text| text.parse().unwrap());
    let (seconds, mut seed) = (number("FUZZ_SECONDS", 60), number("FUZZ_SEED", 1000));
    let clock = Env::real().clock;
    let end = clock.monotonic() + Duration::from_secs(seconds);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (mut messages, mut sessions) = (0_u64, 0_u64);
    while clock.monotonic() < end {
        println!("seed {seed}: {messages} messages, {sessions} sessions so far");
        let (world, random) = (World::new(seed), Random::new(seed));
        let honest = world.client();
        for _ in 0..200 {
            for tag in 0..64 {
                let mut bytes = vec![tag % 16];
                bytes.extend(random_bytes(&random, 200));
                one_form::<ToServer>(&bytes);
                one_form::<ToClient>(&bytes);
                // Behind a valid head.
                let mut request = vec![2];
                (1_u64).put(&mut request);
                (0_u64).put(&mut request);
                Caller::default().put(&mut request);
                request.push(tag);
                request.extend(random_bytes(&random, 200));
                one_form::<ToServer>(&request);
                messages += 3;
            }
            session_of_garbage(&world, &runtime, &random);
            sessions += 1;
        }
        let (ino, fh) = honest.create(ROOT, "well").unwrap();
        honest.write(ino, fh, 0, b"well").unwrap();
        assert_eq!(honest.read(ino, fh, 10).unwrap(), b"well");
        seed += 1;
    }
    println!("{messages} messages, {sessions} sessions");
}
