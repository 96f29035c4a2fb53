//! A network that limits, delays, holds back and cuts, for the suites: `relay --listen 127.0.0.1:P
//! --to 127.0.0.1:Q [--up 10Mbit] [--down 10Mbit] [--delay 1ms] [--cut-after BYTES]`
//!
//! `--delay` is that of each direction. It says where it listens, then takes commands from its
//! input, one a line, and answers each with a line: `cut`, `cut-after BYTES`, `hold up|down`,
//! `release up|down`, `up RATE`, `down RATE`, `delay MILLISECONDSms`, `refuse`, `accept`, `carried`
//! (bytes up and down). It goes on when its input ends.

use std::io::BufRead;
use std::net::SocketAddr;
use std::time::Duration;

use clap::Parser;
use ferry::command::shared::parse_duration;
use ferry_bench::relay::{Rate, Relay, Side, Way};

#[derive(Parser)]
struct Options {
    #[arg(long)]
    listen: SocketAddr,
    #[arg(long)]
    to: SocketAddr,
    #[arg(long, default_value = "unlimited")]
    up: Rate,
    #[arg(long, default_value = "unlimited")]
    down: Rate,
    #[arg(long, value_parser = parse_duration, default_value = "0ms")]
    delay: Duration,
    #[arg(long)]
    cut_after: Option<u64>,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let Options { listen, to, up, down, delay, cut_after } = Options::parse();
    let way = |rate| Way { rate, delay };
    let relay = Relay::start(listen, to, way(up), way(down))?;
    if let Some(bytes) = cut_after {
        relay.cut_after(bytes);
    }
    println!("listening on {}", relay.address());
    for line in std::io::stdin().lock().lines() {
        match obey(&relay, &line?) {
            Ok(answer) => println!("{answer}"),
            Err(error) => println!("error: {error}"),
        }
    }
    loop {
        std::thread::park();
    }
}

fn obey(relay: &Relay, command: &str) -> Result<String, String> {
    let words: Vec<&str> = command.split_whitespace().collect();
    let side = |name: &str| match name {
        "up" => Ok(Side::Up),
        "down" => Ok(Side::Down),
        _ => Err(format!("{name:?} is neither up nor down")),
    };
    match words[..] {
        ["cut"] => relay.cut(),
        ["cut-after", bytes] => {
            relay.cut_after(bytes.parse().map_err(|_| format!("{bytes:?} is no number"))?)
        }
        ["hold", name] => relay.hold(side(name)?, true),
        ["release", name] => relay.hold(side(name)?, false),
        ["delay", time] => {
            let delay = parse_duration(time)?;
            [Side::Up, Side::Down]
                .iter()
                .for_each(|side| relay.set(*side, |way| way.delay = delay));
        }
        [name @ ("up" | "down"), rate] => {
            let rate = rate.parse()?;
            relay.set(side(name)?, |way| way.rate = rate);
        }
        ["refuse"] => relay.refuse(true),
        ["accept"] => relay.refuse(false),
        ["carried"] => {
            return Ok(format!("{} {}", relay.carried(Side::Up), relay.carried(Side::Down)));
        }
        _ => return Err(format!("{command:?} is no command")),
    }
    Ok("ok".into())
}
