//! The tables of the database, as redb and as the code that reads its pages without redb name them.

use redb::TableDefinition;

pub type Bytes = &'static [u8];
pub const KEYS: TableDefinition<'static, Bytes, Bytes> = TableDefinition::new("keys");
pub const META: TableDefinition<'static, u8, Bytes> = TableDefinition::new("meta");
/// The key in `META` of the state that the store records about itself.
pub const META_POINT: u8 = 0;
